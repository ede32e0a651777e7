"""Gradient scaling: small gradients of half precision are kept from vanishing, and large ones from doing harm."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

import numpy as np

from cudatool import ops
from cudatool.amp._autocast import check_device_type
from cudatool.errors import UsageError
from cudatool.optim._foreach import (
    amp_foreach_non_finite_check_and_unscale_,
    amp_update_scale_,
    foreach_add_,
    inverse_of,
)
from cudatool.runtime.array import DeviceArray, asarray, full
from cudatool.runtime.dtypes import real, require_int
from cudatool.runtime.traced_calls import traced

__all__ = ["GradScaler"]


class _Stage(StrEnum):
    """What has been done for an optimizer since the last update."""

    READY = "ready"
    UNSCALED = "unscaled"
    STEPPED = "stepped"


@dataclass(slots=True)
class _OptimizerState:
    stage: _Stage = _Stage.READY
    found_inf: dict[int, DeviceArray] = field(default_factory=dict)  # by device: 1 if a gradient there is not finite


class GradScaler:
    """Scales losses up before differentiation, and gradients down after it: :class:`torch.amp.GradScaler`. ::

        scaler = GradScaler()
        for batch in batches:
            loss, model_state = forward(batch)           # under autocast
            grads = backward(scaler.scale(loss), model_state)
            scaler.step(optimizer, grads)                # skipped if a gradient is infinite or NaN
            scaler.update()                              # the scale grows, or backs off

    The scale, how long it has not changed and whether a gradient is infinite or NaN are on the device. Nothing waits
    for it, except :meth:`get_scale`, :meth:`state_dict`, and :meth:`step` of an optimizer that cannot skip by itself;
    so the whole loop can be captured in a graph.

    Parameters
    ----------
    device
        ``"cuda"``, as every array is on such a device.
    init_scale
        The scale at first.
    growth_factor, backoff_factor
        What the scale is multiplied by after `growth_interval` updates in a row without infinite gradients, and at
        each update with one.
    enabled
        If not, nothing is scaled and :meth:`step` is the optimizer's.

    Raises
    ------
    UsageError
        The scale is not above 0, the growth factor not above 1, the backoff factor not between 0 and 1, the interval
        no whole number above 0, or `device` another.
    """

    def __init__(
        self,
        device: str = "cuda",
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        check_device_type(device)
        self._enabled = enabled
        if enabled:
            _check_factors(growth_factor, backoff_factor)
            _check_interval(growth_interval)
        self._init_scale = _as_scale("init_scale", init_scale)
        self._init_growth_tracker = 0
        self._growth_factor = growth_factor
        self._backoff_factor = backoff_factor
        self._growth_interval = growth_interval
        self._scale: DeviceArray | None = None  # both are made where the first output is
        self._growth_tracker: DeviceArray | None = None
        self._states: dict[int, _OptimizerState] = {}  # by id of the optimizer

    # Scaling.

    @traced
    def scale(self, outputs: Any) -> Any:
        """Return the outputs times the scale.

        Parameters
        ----------
        outputs
            An array, which keeps its dtype, except half precision without dimensions, which becomes float32; or an
            iterable of such, or of iterables. Lists and tuples come back as what they are, others as an iterator.

        Raises
        ------
        UsageError
            It is something else.
        """
        if not self._enabled:
            return outputs
        return self._scaled(outputs, {})

    def _scaled(self, outputs: Any, scales: dict[int, DeviceArray]) -> Any:
        if isinstance(outputs, DeviceArray):
            if self._scale is None:
                self._scale = full((), self._init_scale, device=outputs.device)
                self._growth_tracker = full((), self._init_growth_tracker, np.int32, device=outputs.device)
            if outputs.device not in scales:
                scales[outputs.device] = asarray(self._scale, device=outputs.device)
            return ops.mul(outputs, scales[outputs.device])
        if isinstance(outputs, Iterable) and not isinstance(outputs, str | bytes | np.ndarray):
            each = (self._scaled(output, scales) for output in outputs)
            return type(outputs)(each) if isinstance(outputs, list | tuple) else each
        raise UsageError(f"outputs must be an array or an iterable of arrays, not {type(outputs).__name__}")

    @traced
    def unscale_(self, optimizer: Any, grads: Sequence[DeviceArray | None]) -> None:
        """Divide gradients by the scale, in place, and note whether one is infinite or NaN.

        For those who look at the gradients before :meth:`step`, for instance to clip them; else :meth:`step` does it.

        Parameters
        ----------
        optimizer
            Whose gradients they are.
        grads
            Those of its parameters; None counts as none.

        Raises
        ------
        UsageError
            They are float16, whose range does not take an unscaling; or this optimizer's were unscaled already, or it
            has stepped, since the last :meth:`update`; or nothing was scaled before.
        """
        if not self._enabled:
            return
        scale, _ = self._on_device("unscale_")
        _check_gradients(grads)
        state = self._state_of(optimizer)
        if state.stage is _Stage.UNSCALED:
            raise UsageError("unscale_() has already been called on this optimizer since the last update()")
        if state.stage is _Stage.STEPPED:
            raise UsageError("unscale_() is being called after step(); call update() first")
        if any(grad is not None and grad.dtype == np.float16 for grad in grads):
            raise UsageError(
                "attempting to unscale float16 gradients; keep the parameters in float32, or pass the "
                "gradients to step(), whose fused optimizer divides as it steps"
            )
        state.found_inf = _check_and_unscale(grads, inverse_of(scale))
        state.stage = _Stage.UNSCALED

    @traced
    def step(self, optimizer: Any, grads: Sequence[DeviceArray | None], *args: Any, **kwargs: Any) -> Any:
        """Unscale the gradients, unless :meth:`unscale_` has, and step unless one of them is infinite or NaN.

        An optimizer of :mod:`cudatool.optim` does both in its own kernel; its gradients are also divided by its
        ``grad_scale``, if the program has set one, which holds for this step. Any other is one with ``step(grads)``:
        this waits for the device, and leaves the call out if there was an infinite gradient.

        Parameters
        ----------
        grads, args, kwargs
            What the optimizer's own ``step`` takes.

        Returns
        -------
        object
            What that returned; None if it was not called.

        Raises
        ------
        UsageError
            The optimizer has stepped since the last :meth:`update`; or nothing was scaled before, or there are no
            gradients.
        """
        if not self._enabled:
            return optimizer.step(grads, *args, **kwargs)
        if "closure" in kwargs:
            raise UsageError("a closure computes gradients that are not scaled; pass the gradients")
        scale, _ = self._on_device("step")
        _check_gradients(grads)
        if not callable(getattr(optimizer, "step", None)):
            raise UsageError(f"step() takes an optimizer, with a method step(grads), not {type(optimizer).__name__}")
        state = self._state_of(optimizer)
        if state.stage is _Stage.STEPPED:
            raise UsageError("step() has already been called since the last update()")
        if getattr(optimizer, "_step_supports_amp_scaling", False):
            if state.stage is _Stage.READY:
                # Looks only: what multiplies by 1 changes nothing.
                state.found_inf = _check_and_unscale(grads, full((), 1, device=scale.device))
            grad_scale = getattr(optimizer, "grad_scale", None)  # by the program, for this step
            if state.stage is _Stage.READY:
                grad_scale = scale if grad_scale is None else ops.mul(scale, grad_scale.reshape(()))
            found_inf = _combined(state.found_inf.values(), scale.device)
            optimizer.grad_scale, optimizer.found_inf = grad_scale, found_inf
            try:
                result = optimizer.step(grads, *args, **kwargs)
            finally:
                del optimizer.grad_scale, optimizer.found_inf
        else:
            if state.stage is _Stage.READY:
                self.unscale_(optimizer, grads)
            found = any(inf.get() for inf in state.found_inf.values())
            result = None if found else optimizer.step(grads, *args, **kwargs)
        state.stage = _Stage.STEPPED
        return result

    @traced
    def update(self, new_scale: float | DeviceArray | None = None) -> None:
        """Let the scale grow or back off, by what was found in the gradients since the last update.

        Parameters
        ----------
        new_scale
            Sets the scale to this instead: a number, or one on the device.

        Raises
        ------
        UsageError
            Nothing was scaled, or no gradients were looked at, since the last update.
        """
        if not self._enabled:
            return
        scale, tracker = self._on_device("update")
        if isinstance(new_scale, DeviceArray):
            if new_scale.size != 1 or new_scale.dtype != np.float32:
                raise UsageError(f"new_scale must be a number, or one float32 on the device, not {new_scale!r}")
            scale.copy_(new_scale.reshape(()))
        elif new_scale is not None:
            scale.fill_(_as_scale("new_scale", new_scale))
        else:
            found = [inf for state in self._states.values() for inf in state.found_inf.values()]
            if not found:
                raise UsageError("no gradients were checked since the last update(); call step() or unscale_() first")
            amp_update_scale_(
                scale,
                tracker,
                _combined(found, scale.device),
                self._growth_factor,
                self._backoff_factor,
                self._growth_interval,
            )
        self._states = {}

    def _on_device(self, caller: str) -> tuple[DeviceArray, DeviceArray]:
        if self._scale is None or self._growth_tracker is None:
            raise UsageError(f"{caller}() before anything was scaled; call scale() on the loss first")
        return self._scale, self._growth_tracker

    def _state_of(self, optimizer: Any) -> _OptimizerState:
        return self._states.setdefault(id(optimizer), _OptimizerState())

    # Its values.

    @traced
    def get_scale(self) -> float:
        """Return the scale, 1.0 if disabled. Waits for the device."""
        if not self._enabled:
            return 1.0
        return self._init_scale if self._scale is None else float(self._scale.get())

    def get_growth_factor(self) -> float:
        """Return what the scale is multiplied by when it grows."""
        return self._growth_factor

    def set_growth_factor(self, new_factor: float) -> None:
        """Change what the scale is multiplied by when it grows."""
        _check_factors(new_factor, self._backoff_factor)
        self._growth_factor = new_factor

    def get_backoff_factor(self) -> float:
        """Return what the scale is multiplied by when it backs off."""
        return self._backoff_factor

    def set_backoff_factor(self, new_factor: float) -> None:
        """Change what the scale is multiplied by when it backs off."""
        _check_factors(self._growth_factor, new_factor)
        self._backoff_factor = new_factor

    def get_growth_interval(self) -> int:
        """Return after how many updates without infinite gradients the scale grows."""
        return self._growth_interval

    def set_growth_interval(self, new_interval: int) -> None:
        """Change after how many updates without infinite gradients the scale grows."""
        _check_interval(new_interval)
        self._growth_interval = new_interval

    def is_enabled(self) -> bool:
        """Return whether it scales at all."""
        return self._enabled

    def _growth_count(self) -> int:
        return self._init_growth_tracker if self._growth_tracker is None else int(self._growth_tracker.get())

    @traced
    def state_dict(self) -> dict[str, Any]:
        """Return its values as numbers, under torch's names; nothing if disabled. Waits for the device."""
        if not self._enabled:
            return {}
        return {
            "scale": self.get_scale(),
            "growth_factor": self._growth_factor,
            "backoff_factor": self._backoff_factor,
            "growth_interval": self._growth_interval,
            "_growth_tracker": self._growth_count(),
        }

    @traced
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take over what :meth:`state_dict` returned; nothing if disabled.

        Raises
        ------
        UsageError
            It is empty, as that of a disabled scaler is, or lacks a value, or has one that cannot be.
        """
        if not self._enabled:
            return
        if not state_dict:
            raise UsageError("the state is empty; it is probably that of a disabled GradScaler")
        names = "scale", "_growth_tracker", "growth_factor", "backoff_factor", "growth_interval"
        if missing := [name for name in names if name not in state_dict]:
            raise UsageError(f"the state of a GradScaler has {', '.join(names)}; there is no {', '.join(missing)}")
        scale, tracker, growth, backoff, interval = (state_dict[name] for name in names)
        _check_factors(growth, backoff)
        _check_interval(interval)
        self._init_scale, self._init_growth_tracker = _as_scale("scale", scale), require_int("_growth_tracker", tracker)
        self._growth_factor, self._backoff_factor, self._growth_interval = growth, backoff, interval
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(self._init_scale)
            self._growth_tracker.fill_(self._init_growth_tracker)

    def __getstate__(self) -> dict[str, Any]:
        if self._states:
            raise UsageError("a GradScaler can be pickled after update() only, or before anything was scaled")
        values = {"_init_scale": self.get_scale(), "_init_growth_tracker": self._growth_count()}
        return {**self.__dict__, **values, "_scale": None, "_growth_tracker": None}


def _as_scale(name: str, value: Any) -> float:
    scale = float(real(name, value))
    if not 0 < scale < math.inf:
        raise UsageError(f"{name} must be above 0 and finite, not {scale}")
    return scale


def _check_factors(growth: Any, backoff: Any) -> None:
    if not real("growth_factor", growth) > 1:
        raise UsageError(f"growth_factor must be above 1, not {growth}")
    if not 0 < real("backoff_factor", backoff) < 1:
        raise UsageError(f"backoff_factor must be above 0 and below 1, not {backoff}")


def _check_interval(interval: Any) -> None:
    if require_int("growth_interval", interval) < 1:
        raise UsageError(f"growth_interval must be at least 1, not {interval}")


def _check_gradients(grads: Any) -> None:
    if not isinstance(grads, Sequence) or not all(grad is None or isinstance(grad, DeviceArray) for grad in grads):
        raise UsageError(f"gradients come as a list of arrays on the device, or None for none, not {grads!r}")


def _check_and_unscale(grads: Sequence[DeviceArray | None], inverse: DeviceArray) -> dict[int, DeviceArray]:
    """Multiply gradients by `inverse`, and return for each of their devices whether one is infinite or NaN."""
    present = [grad for grad in grads if grad is not None]
    if not present:
        raise UsageError("there are no gradients to check for infinities; every one is None")
    found_inf = {}
    for device in sorted({grad.device for grad in present}):
        found_inf[device] = full((), 0, device=device)
        amp_foreach_non_finite_check_and_unscale_(
            [grad for grad in present if grad.device == device], found_inf[device], asarray(inverse, device=device)
        )
    return found_inf


def _combined(found: Iterable[DeviceArray], device: int) -> DeviceArray:
    """Return one number on the device that is 0 if all are."""
    first, *others = found
    if not others and first.device == device:
        return first
    total = full((), 0, device=device)
    for each in (first, *others):
        foreach_add_([total], asarray(each, device=device))
    return total
