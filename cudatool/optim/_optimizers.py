"""Optimizers as objects: parameters in groups, their options, and their state on the device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, Final
from weakref import WeakValueDictionary

import numpy as np

from cudatool.errors import UsageError
from cudatool.optim._adam import fused_adam_, fused_adamw_
from cudatool.optim._foreach import foreach_add_, foreach_copy_, foreach_zero_
from cudatool.optim._sgd import fused_sgd_
from cudatool.runtime.array import DeviceArray, zeros
from cudatool.runtime.dtypes import real
from cudatool.runtime.multi_tensor import FLOATS, Arrays, empty_alike
from cudatool.runtime.traced_calls import traced

__all__ = ["SGD", "Adam", "AdamW", "Optimizer", "is_parameter"]

_LOW_PRECISION: Final = 2  # bytes of an element that can have a master copy
_parameters: Final[WeakValueDictionary[int, DeviceArray]] = WeakValueDictionary()  # of all optimizers, by id


def is_parameter(array: DeviceArray) -> bool:
    """Return whether an optimizer has the array among its parameters."""
    return _parameters.get(id(array)) is array


class Optimizer:
    """What all optimizers have in common; shaped like :class:`torch.optim.Optimizer`.

    The state is on the device and is made with the optimizer, so that :meth:`step` can be captured in a graph as it
    is: each replay is a step. The options are then those of the capture, except an `lr` that is on the device.

    Parameters
    ----------
    params
        Arrays, or groups: dictionaries with ``"params"`` and the options that differ from `defaults`.
    defaults
        The options of groups that do not say otherwise.

    Attributes
    ----------
    param_groups
        One dictionary per group: its ``"params"``, which stay, and its options, which may be changed between steps.
    state
        One dictionary per parameter, in the order of the groups: name of a part of the state -> array. The arrays stay;
        copy into them.
    """

    _step_supports_amp_scaling: ClassVar[bool] = True  # as torch names it: GradScaler leaves the unscaling to step()

    def __init__(
        self, params: Iterable[DeviceArray] | Iterable[Mapping[str, Any]], defaults: Mapping[str, Any]
    ) -> None:
        self.defaults = dict(defaults)
        self.param_groups: list[dict[str, Any]] = []
        self.state: list[dict[str, DeviceArray]] = []
        self._lists: dict[tuple[int, bool], tuple[list[int], dict[str, Arrays]]] = {}
        if isinstance(params, DeviceArray | str) or not isinstance(params, Iterable):
            raise UsageError(f"an optimizer takes a list of arrays, or of groups, not {type(params).__name__}")
        given = list(params)
        if not given:
            raise UsageError("an optimizer needs parameters; the list is empty")
        for group in given if isinstance(given[0], Mapping) else [{"params": given}]:
            self.add_param_group(group)  # type: ignore[arg-type]

    def add_param_group(self, param_group: Mapping[str, Any]) -> None:
        """Add parameters, with their own options.

        Raises
        ------
        UsageError
            They are no arrays, belong to a group already, or an option is wrong.
        """
        if not isinstance(param_group, Mapping) or "params" not in param_group:
            raise UsageError('a group is a dictionary with its parameters under "params"')
        group = {**self.defaults, **param_group}
        own = group["params"]
        if not isinstance(own, DeviceArray | Iterable):
            raise UsageError(f'"params" must be arrays, not {type(own).__name__}')
        group["params"] = [own] if isinstance(own, DeviceArray) else list(own)
        unknown = group.keys() - self.defaults.keys() - {"params"}
        if unknown:
            raise UsageError(
                f"{type(self).__name__} has no option {', '.join(sorted(unknown))}; it has {', '.join(self.defaults)}"
            )
        known = {id(param) for other in self.param_groups for param in other["params"]}
        for param in group["params"]:
            if not isinstance(param, DeviceArray):
                raise UsageError(f"parameters are arrays on the device, not {type(param).__name__}; use asarray")
            if id(param) in known:
                raise UsageError(f"{param!r} is a parameter already; every parameter belongs to one group, once")
            if param.dtype not in FLOATS:
                raise UsageError(f"parameters are {', '.join(map(str, FLOATS))}, not {param.dtype}")
            if not param.layout.flags.writeable:
                raise UsageError(f"{param!r} is read-only, so it cannot be a parameter")
            known.add(id(param))
        self._check(group)
        state = self._initial_state(group)  # first: there may be no memory for it
        self.param_groups.append(group)
        self.state += state
        _parameters.update({id(param): param for param in group["params"]})

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise UsageError for options that make no sense."""
        for name in ("lr", "eps", "weight_decay", "momentum", "dampening"):
            value = group.get(name, 0.0)
            if name == "lr" and isinstance(value, DeviceArray):
                if value.size != 1 or value.dtype != np.float32:
                    raise UsageError(f"lr must be a number, or one float32 on the device, not {value!r}")
            elif not real(name, value) >= 0 and name != "dampening":
                raise UsageError(f"{name} must not be below 0: {value}")

    def _initial_state(self, group: Mapping[str, Any]) -> list[dict[str, DeviceArray]]:
        """Return the state of each parameter of a new group."""
        state: list[dict[str, DeviceArray]] = [{} for _ in group["params"]]
        if group["master_weights"]:
            for param, own in zip(group["params"], state, strict=True):
                if param.dtype.itemsize == _LOW_PRECISION:
                    own["master_param"] = empty_alike(param, np.float32)
            low = [param for param, own in zip(group["params"], state, strict=True) if own]
            foreach_copy_([own["master_param"] for own in state if own], low)
        return state

    @traced
    def step(self, grads: Sequence[DeviceArray | None]) -> None:
        """Change the parameters by their gradients.

        Parameters
        ----------
        grads
            One for each parameter, in the order of the groups; None leaves a parameter and its state alone.

        Raises
        ------
        UsageError
            There are too many or too few, or one does not fit its parameter.
        """
        params = sum(len(group["params"]) for group in self.param_groups)
        self._check_gradients(grads)
        if len(grads) != params:
            raise UsageError(f"{len(grads)} gradients for {params} parameters; pass one for each, None for none")
        start = 0
        for group in self.param_groups:
            stop = start + len(group["params"])
            for masters in (False, True):
                chosen = [
                    index
                    for index in range(start, stop)
                    if grads[index] is not None and ("master_param" in self.state[index]) == masters
                ]
                if chosen:
                    own = Arrays(grads[index] for index in chosen)  # type: ignore[misc]
                    self._step(group, own, self._lists_of(group, start, chosen))
            start = stop

    def _check_gradients(self, grads: Any) -> None:
        if not isinstance(grads, list | tuple) or {type(grad) for grad in grads} - {DeviceArray, type(None)}:
            raise UsageError(f"gradients come as a list of arrays on the device, or None for none, not {grads!r}")

    def _lists_of(self, group: Mapping[str, Any], start: int, chosen: list[int]) -> dict[str, Arrays]:
        """Return parameters and each part of their state as lists: those of the step before, if they were the same."""
        parts = self.state[chosen[0]]
        known = self._lists.get((start, "master_param" in parts))
        if known is None or known[0] != chosen:
            lists = {part: Arrays(self.state[index][part] for index in chosen) for part in parts}
            lists["params"] = Arrays(group["params"][index - start] for index in chosen)
            known = self._lists[start, "master_param" in parts] = chosen, lists
        return known[1]

    def _step(self, group: Mapping[str, Any], grads: Arrays, lists: Mapping[str, Sequence[DeviceArray]]) -> None:
        """Take a step of some parameters of a group; `lists` has their ``"params"`` and the parts of their state."""
        raise NotImplementedError

    def _scaling(self) -> dict[str, DeviceArray | None]:
        """Return what a GradScaler has left here for the time of a step."""
        return {name: getattr(self, name, None) for name in ("grad_scale", "found_inf")}

    @traced
    def zero_grad(self, grads: Sequence[DeviceArray | None]) -> None:
        """Set gradients to 0, for those that accumulate in place."""
        self._check_gradients(grads)
        foreach_zero_([grad for grad in grads if grad is not None])

    def state_dict(self) -> dict[str, Any]:
        """Return state and options, in torch's schema; the arrays are those in use, not copies."""
        start, groups = 0, []
        for group in self.param_groups:
            stop = start + len(group["params"])
            groups.append({**group, "params": list(range(start, stop))})
            start = stop
        return {"state": {index: dict(own) for index, own in enumerate(self.state)}, "param_groups": groups}

    @traced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Copy state and options from what :meth:`state_dict` returned, here or in another process.

        The state stays where it is, so that captured graphs go on with what was loaded. Its arrays may be anything
        that :meth:`DeviceArray.copy_` takes.

        Raises
        ------
        UsageError
            It is the state of other groups, or of another optimizer.
        """
        groups = state_dict.get("param_groups") if isinstance(state_dict, Mapping) else None
        if not isinstance(groups, list) or not all("params" in group for group in groups) or "state" not in state_dict:
            raise UsageError("this is not the state of an optimizer, as state_dict() returns it")
        ours, theirs = ([len(group["params"]) for group in each] for each in (self.param_groups, groups))
        if ours != theirs:
            raise UsageError(f"the state is of groups of {theirs} parameters; this optimizer has groups of {ours}")
        for index, own in enumerate(self.state):
            saved = state_dict["state"].get(index, {})
            if own.keys() != saved.keys():
                raise UsageError(
                    f"the state of parameter {index} has {sorted(saved)}; this optimizer needs {sorted(own)}"
                )
            for name, array in own.items():
                array.copy_(saved[name])
        for group, saved in zip(self.param_groups, groups, strict=True):
            for name in self.defaults.keys() & saved.keys():
                if isinstance(group[name], DeviceArray):  # which captured graphs read
                    group[name][...] = saved[name]
                else:
                    group[name] = saved[name].clone() if isinstance(saved[name], DeviceArray) else saved[name]

    def __repr__(self) -> str:
        options = [
            {"params": len(group["params"]), **{name: group[name] for name in self.defaults}}
            for group in self.param_groups
        ]
        return f"{type(self).__name__}({options})"


class Adam(Optimizer):
    """Adam (Kingma and Ba, 2015): :class:`torch.optim.Adam` with ``fused=True``.

    Parameters
    ----------
    params
        Arrays of float32, float64, float16 or bfloat16, or groups of them with options of their own.
    lr
        A number, or one float32 on the device.
    betas, eps, weight_decay, amsgrad, maximize
        As in :func:`fused_adam_`.
    master_weights
        Keep a float32 copy of float16 and bfloat16 parameters, and float32 state for them.
    """

    _fused: ClassVar[Any] = staticmethod(fused_adam_)

    def __init__(
        self,
        params: Iterable[DeviceArray] | Iterable[Mapping[str, Any]],
        lr: float | DeviceArray = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "betas": betas,
                "eps": eps,
                "weight_decay": weight_decay,
                "amsgrad": amsgrad,
                "maximize": maximize,
                "master_weights": master_weights,
            },
        )

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        betas = group["betas"]
        if not isinstance(betas, list | tuple) or len(betas) != 2 or not all(0 <= real("betas", b) < 1 for b in betas):
            raise UsageError(f"betas must be two numbers from 0 on and below 1: {betas}")

    def _initial_state(self, group: Mapping[str, Any]) -> list[dict[str, DeviceArray]]:
        state = super()._initial_state(group)
        parts = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else [])]
        for param, own in zip(group["params"], state, strict=True):
            model = own.get("master_param", param)
            own["step"] = zeros((), device=param.device)
            own |= {part: empty_alike(model, model.dtype).fill_(0) for part in parts}
        return state

    def _step(self, group: Mapping[str, Any], grads: Arrays, lists: Mapping[str, Sequence[DeviceArray]]) -> None:
        scaling = self._scaling()
        foreach_add_(lists["step"], 1.0, found_inf=scaling["found_inf"])
        self._fused(
            lists["params"],
            grads,
            lists["exp_avg"],
            lists["exp_avg_sq"],
            lists.get("max_exp_avg_sq", ()),
            lists["step"],
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=group["amsgrad"],
            maximize=group["maximize"],
            master_params=lists.get("master_param", ()),
            **scaling,
        )


class AdamW(Adam):
    """AdamW (Loshchilov and Hutter, 2019): :class:`torch.optim.AdamW` with ``fused=True``; parameters as of Adam."""

    _fused = staticmethod(fused_adamw_)

    def __init__(
        self,
        params: Iterable[DeviceArray] | Iterable[Mapping[str, Any]],
        lr: float | DeviceArray = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(
            params, lr, betas, eps, weight_decay, amsgrad, maximize=maximize, master_weights=master_weights
        )


class SGD(Optimizer):
    """SGD with momentum: :class:`torch.optim.SGD` with ``fused=True``.

    Parameters
    ----------
    params, lr, master_weights
        As of :class:`Adam`.
    momentum, dampening, weight_decay, nesterov, maximize
        As in :func:`fused_sgd_`. The first step that changes anything is the one that `dampening` leaves alone.
    """

    def __init__(
        self,
        params: Iterable[DeviceArray] | Iterable[Mapping[str, Any]],
        lr: float | DeviceArray = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        master_weights: bool = False,
    ) -> None:
        super().__init__(
            params,
            {
                "lr": lr,
                "momentum": momentum,
                "dampening": dampening,
                "weight_decay": weight_decay,
                "nesterov": nesterov,
                "maximize": maximize,
                "master_weights": master_weights,
            },
        )

    def _check(self, group: Mapping[str, Any]) -> None:
        super()._check(group)
        if group["nesterov"] and (not group["momentum"] or group["dampening"]):
            raise UsageError("nesterov needs a momentum and no dampening")

    def _initial_state(self, group: Mapping[str, Any]) -> list[dict[str, DeviceArray]]:
        state = super()._initial_state(group)
        if group["momentum"]:
            for param, own in zip(group["params"], state, strict=True):
                model = own.get("master_param", param)
                # Zero makes the first step what it is without dampening, so that a graph may contain it.
                own["momentum_buffer"] = empty_alike(model, model.dtype).fill_(0)
                if group["dampening"]:
                    own["step"] = zeros((), device=param.device)
        return state

    def _step(self, group: Mapping[str, Any], grads: Arrays, lists: Mapping[str, Sequence[DeviceArray]]) -> None:
        scaling = self._scaling()
        steps = lists.get("step", ())
        fused_sgd_(
            lists["params"],
            grads,
            lists.get("momentum_buffer", ()),
            weight_decay=group["weight_decay"],
            momentum=group["momentum"],
            lr=group["lr"],
            dampening=group["dampening"],
            nesterov=group["nesterov"],
            maximize=group["maximize"],
            is_first_step=False,
            state_steps=steps,
            master_params=lists.get("master_param", ()),
            **scaling,
        )
        foreach_add_(steps, 1.0, found_inf=scaling["found_inf"])
