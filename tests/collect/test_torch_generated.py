"""What PyTorch's compiler knows of the code that it generates, in a recording: with stand-ins for its modules."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import pytest
from click.testing import CliRunner

from cudatool import analyze
from cudatool.cli.snapshot import snapshot
from cudatool.collect import torch_generated
from cudatool.collect.torch_generated import GeneratedFiles, module_path
from cudatool.trace import hooks, reader, stacks
from cudatool.trace.events import GeneratedFlag, Kind, pack_pool
from cudatool.trace.model import Frame, Trace
from cudatool.trace.recorder import Recorder
from cudatool.trace.ring import Ring
from cudatool.trace.window import window
from cudatool.viz.payload import payload

SOURCE = """# AOT ID: ['0_forward']
def call(args):
    arg0_1, arg1_1 = args
    buf0 = empty_strided_cuda((8, 8), (8, 1), torch.float32)
    # Topologically Sorted Source Nodes: [linear_1], Original ATen: [aten.addmm]
    extern_kernels.mm(arg0_1, arg1_1, out=buf0)
    buf1 = buf0; del buf0  # reuse
    return (buf1, )
"""
LINES = '  File "/home/me/model.py", line 20, in forward\n    y = f(x)\n  File "/home/me/model.py", line 7, in forward\n    y'
MODEL = (Frame("/home/me/model.py", "forward", 7), Frame("/home/me/model.py", "forward", 20))
HASH = "ab" + "c2d3" * 12 + "e"
LAYER = {"1": ("L['self'].layers.0", list), "2": ("L['self'].layers.0.fc", dict)}


class Node:
    """A node of a graph."""

    def __init__(self, name: str, lines: str | None = LINES, modules: Any = None, key: str = "nn_module_stack") -> None:
        self.name, self.stack_trace, self.users = name, lines, dict[Node, None]()
        self.meta = {key: LAYER if modules is None else modules}


class Buffer:
    def __init__(self, *origins: Node, node: Node | None = None) -> None:
        self.get_origins = lambda: set(origins)
        self.get_origin_node = lambda: node


def graph_of(*nodes: Node, **buffers: Buffer) -> Any:
    return SimpleNamespace(graph=SimpleNamespace(nodes=nodes), name_to_buffer=buffers)


class Compiler:
    """The modules of PyTorch's compiler that are watched."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
        self.path = folder / HASH[:2] / f"c{HASH}.py"
        self.path.parent.mkdir()
        self.path.write_text(SOURCE)
        self.compiled: list[Any] = []
        modules = {name: ModuleType(f"torch.{name}") for name in ("_inductor.codecache", "_inductor.compile_fx")}
        self.virtualized = SimpleNamespace(V=SimpleNamespace(graph=None))
        current = SimpleNamespace(CompileContext=SimpleNamespace(current_compile_id=lambda: "0/0"))

        class PyCodeCache:
            linemaps: ClassVar[dict[str, Any]] = {}

            @classmethod
            def load_by_key_path(cls, key: str, path: str, linemap: Any = None, attrs: Any = None) -> str:
                return f"{cls.__name__} {key} {attrs}"

        self.cache, self.compile_fx = PyCodeCache, modules["_inductor.compile_fx"]
        modules["_inductor.codecache"].PyCodeCache = PyCodeCache  # type: ignore[attr-defined]
        self.compile_fx.compile_fx = lambda model, *args: self.compiled.append(model)  # type: ignore[attr-defined]
        for name, module in (*modules.items(), ("_inductor.virtualized", self.virtualized), ("_guards", current)):
            monkeypatch.setitem(sys.modules, f"torch.{name}", module)

    def load(self, graph: Any = None, linemap: Any = ((1, LINES),)) -> str:
        self.virtualized.V.graph = graph
        return self.cache.load_by_key_path("key", str(self.path), linemap, attrs=3)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Compiler]:
    monkeypatch.setenv("CUDATOOL_CACHE_DIR", str(tmp_path / "cache"))
    yield Compiler(monkeypatch, tmp_path)
    torch_generated.stop()


def recorded(compiler: Compiler, graph: Any = None, linemap: Any = ((1, LINES),), line: int = 4) -> Trace:
    """Return a recording of a file that is loaded, and of a block that its line allocates."""
    path = compiler.path.with_name("x.ctrace")
    with Recorder(path, header={}):
        torch_generated.start()
        compiler.load(graph, linemap)
        at = stacks.intern([Frame(str(compiler.path), "call", line), Frame("/home/me/train.py", "step", 40)])
        hooks.emit(Kind.BLOCK_ALLOC, device=0, address=1 << 20, size=1024, aux0=1000, stack=at)
    return reader.read(path)


def site_of(trace: Trace) -> tuple[analyze.CallSite, analyze.GeneratedShare]:
    (device,) = analyze.report(trace).summary.devices
    assert device.generated is not None
    return device.at_peak[0], device.generated


def test_a_buffer_has_the_nodes_the_module_and_the_line_of_the_graph(compiler: Compiler) -> None:
    added, main = Node("permute", None, {}), Node("addmm")
    trace = recorded(compiler, graph_of(added, main, buf0=Buffer(main, added, node=main)))
    site, share = site_of(trace)
    assert site.label == "model.py:7 (forward)"
    expected = {"nodes": ("permute", "addmm"), "module": "layers.0.fc", "buffer": "buf0", "reused_by": ("buf1",)}
    assert site.compiled == analyze.Compiled((), "addmm", **expected)
    assert site.compiled.described(site.label) == "model.py:7 (forward) [layers.0.fc -> addmm -> buf0]"
    assert (share.size, share.count, share.attributed, share.with_module, share.unattributed) == (
        1024,
        1,
        1024,
        1024,
        (),
    )


def test_the_stack_goes_on_in_the_program(compiler: Compiler) -> None:
    main = Node("addmm")
    trace = recorded(compiler, graph_of(main, buf0=Buffer(main)))
    (alloc,) = trace.of_kind(Kind.BLOCK_ALLOC)
    generated, caller = Frame(str(compiler.path), "call", 4), Frame("/home/me/train.py", "step", 40)
    assert trace.stack(alloc["stack"]) == (*MODEL, generated, caller)


def test_a_node_of_the_backward_graph_has_the_module_of_its_forward_one(compiler: Compiler) -> None:
    node = Node("mm", key="fwd_nn_module_stack")
    compiler.path.write_text(SOURCE.replace("0_forward", "0_backward"))
    trace = recorded(compiler, graph_of(node, buf0=Buffer(node)))
    assert site_of(trace)[0].compiled.module == "layers.0.fc"
    assert list(trace.generated.flags.values()) == [GeneratedFlag.BACKWARD]
    (device,) = analyze.report(trace).diagnoses
    assert [share.rule.category for share in device.categories.at_peak] == ["gradients"]


def test_temporary_memory_of_a_kernel_has_the_nodes_of_what_it_writes(compiler: Compiler) -> None:
    main = Node("addmm")
    site, share = site_of(recorded(compiler, graph_of(main, buf0=Buffer(main)), line=6))
    assert site.compiled.described("") == " [layers.0.fc -> addmm -> temporary]"
    assert share.attributed == share.size


def test_a_file_of_the_cache_has_lines_and_the_nodes_that_its_comments_name(compiler: Compiler) -> None:
    trace = recorded(compiler)
    site, share = site_of(trace)
    assert site.label == "model.py:7 (forward)"
    assert (site.compiled.nodes, site.compiled.module) == (("linear_1",), "")
    assert (share.attributed, share.with_module) == (1024, 0)
    assert list(trace.generated.flags.values()) == [GeneratedFlag.NO_GRAPH]


def test_a_file_of_the_cache_has_what_a_recorded_process_compiled(compiler: Compiler) -> None:
    main = Node("addmm")
    torch_generated.start()
    compiler.load(graph_of(main, buf0=Buffer(main)))
    torch_generated.stop()
    trace = recorded(compiler)
    site, share = site_of(trace)
    assert site.label == "model.py:7 (forward)"
    assert (site.compiled.fx_node, site.compiled.module, site.compiled.reused_by) == ("addmm", "layers.0.fc", ("buf1",))
    assert share.with_module == share.size
    assert list(trace.generated.flags.values()) == [GeneratedFlag(0)]


def test_what_was_compiled_from_other_lines_is_not_used(compiler: Compiler) -> None:
    main = Node("addmm")
    torch_generated.start()
    compiler.load(graph_of(main, buf0=Buffer(main)), linemap=((1, LINES.replace("line 7", "line 8")),))
    torch_generated.stop()
    site, _ = site_of(recorded(compiler))
    assert (site.compiled.nodes, site.compiled.module) == (("linear_1",), "")


def test_a_cache_that_cannot_be_used_changes_nothing(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDATOOL_CACHE_SIZE", "much")
    main = Node("addmm")
    site, share = site_of(recorded(compiler, graph_of(main, buf0=Buffer(main))))
    assert (site.compiled.module, share.attributed) == ("layers.0.fc", 1024)


def test_a_file_of_the_cache_has_the_module_of_the_node_that_was_traced_now(compiler: Compiler) -> None:
    path = compiler.path.with_name("x.ctrace")
    with Recorder(path, header={}):
        torch_generated.start()
        model = SimpleNamespace(graph=SimpleNamespace(nodes=[Node("linear", modules={}), Node("linear_1")]))
        compiler.compile_fx.compile_fx(model, [])
        compiler.load()
    assert compiler.compiled == [model]
    (lines,) = reader.read(path).generated.lines.values()
    assert lines[4].module == "layers.0.fc"


def test_a_copy_of_an_argument_is_of_the_node_that_takes_it(compiler: Compiler) -> None:
    argument, convolution = Node("primals_1", None, {}), Node("convolution")
    argument.users[convolution] = None
    site, _ = site_of(recorded(compiler, graph_of(argument, convolution, buf0=Buffer(argument, node=argument))))
    assert (site.compiled.nodes, site.compiled.module) == (("primals_1",), "layers.0.fc")
    assert site.label == "model.py:7 (forward)"


def test_the_line_of_modules_of_pytorch_alone_is_that_of_the_call(compiler: Compiler) -> None:
    node, path = Node("relu", None), compiler.path.with_name("x.ctrace")
    other = Node("mul", modules={})  # an earlier one of another line: the module and the line are of one node
    with Recorder(path, header={}):
        torch_generated.start()
        compiler.compile_fx.compile_fx(SimpleNamespace(graph=SimpleNamespace(nodes=[])))
        compiler.load(graph_of(other, node, buf0=Buffer(other, node, node=node)))
        stack = stacks.intern([Frame(str(compiler.path), "call", 4)])
        hooks.emit(Kind.BLOCK_ALLOC, device=0, address=1 << 20, size=1024, aux0=1000, stack=stack)
    site, share = site_of(reader.read(path))
    assert site.label.startswith("test_torch_generated.py:")
    assert (site.compiled.module, share.attributed) == ("layers.0.fc", 1024)


@pytest.mark.parametrize(
    ("linemap", "source", "line", "reason"),
    [
        ((), SOURCE, 4, analyze.Unattributed.NO_LINE),
        (((1, LINES),), SOURCE.replace("# Topo", "# "), 4, analyze.Unattributed.NO_NODE),
        (((1, LINES),), SOURCE, 3, analyze.Unattributed.NO_BUFFER),
        (((1, LINES),), "#include <torch>\nint x;", 4, analyze.Unattributed.UNREADABLE),
        (None, SOURCE, 4, analyze.Unattributed.NO_FILE),
    ],
)
def test_what_is_not_attributed_is_counted(
    compiler: Compiler, linemap: Any, source: str, line: int, reason: analyze.Unattributed
) -> None:
    compiler.path.write_text(source)
    site, share = site_of(recorded(compiler, linemap=linemap, line=line))
    assert share.unattributed == (analyze.UnattributedShare(reason, 1024, 1),)
    assert (share.attributed, share.size) == (0, 1024)
    assert reason.text
    assert site.label.endswith(f"cabc2d3c...py:{line} (call)") or site.label == "model.py:7 (forward)"


def test_a_compiler_with_other_internals_runs_on_and_is_counted(compiler: Compiler) -> None:
    torch_generated.start()
    broken = SimpleNamespace(graph=None, name_to_buffer={})
    assert compiler.load(broken) == "PyCodeCache key 3"
    (event,) = torch_generated.living()
    assert (event.kind, event.flags) == (Kind.GENERATED_FILE, GeneratedFlag.UNREADABLE)


def test_a_recording_that_begins_later_has_what_was_loaded_before(compiler: Compiler) -> None:
    compiler.cache.linemaps[str(compiler.path)] = list(zip((1, LINES), strict=True))
    files = GeneratedFiles()
    kinds = [event.kind for event in files.events]
    files.stop()
    assert kinds[:3] == [Kind.GENERATED_FILE, Kind.GENERATED_LINE, Kind.GENERATED_FACT]
    assert files.events[0].name == str(compiler.path)


def test_afterwards_the_compiler_is_as_it_was(compiler: Compiler) -> None:
    before = vars(compiler.cache)["load_by_key_path"], compiler.compile_fx.compile_fx
    torch_generated.start()
    assert vars(compiler.cache)["load_by_key_path"] is not before[0]
    torch_generated.stop()
    assert (vars(compiler.cache)["load_by_key_path"], compiler.compile_fx.compile_fx) == before
    assert compiler.load() == "PyCodeCache key 3"
    assert torch_generated.living() == []


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("L['self'].layers.0.fc1", "layers.0.fc1"),
        ("L['self']._modules['layers']._modules['0']", "layers.0"),
        ("getattr(L['self'].blocks, '0').attn", "blocks.0.attn"),
        ("getattr(getattr(L['self'].layer1, '0').bn, 'x')", "layer1.0.bn.x"),
        ("L['fn'].0", "0"),
        ("L['model'].head", "model.head"),
        ("G['net'].blocks[3]", "net.blocks.3"),
        ("L['self']", "Model"),
    ],
)
def test_the_path_of_a_module(source: str, expected: str) -> None:
    assert module_path(source, "Model") == expected


def test_snapshot_and_page_show_module_node_buffer_and_what_is_missing(compiler: Compiler) -> None:
    main, path = Node("addmm"), compiler.path.with_name("x.ctrace")
    with Recorder(path, header={}):
        torch_generated.start()
        compiler.load(graph_of(main, buf0=Buffer(main)))
        for number, line in enumerate((4, 3)):
            at = stacks.intern([Frame(str(compiler.path), "call", line), Frame("/home/me/train.py", "step", 40)])
            where = {"address": (number + 1) << 20, "size": 1024 * (3 - number), "aux0": 1024}
            hooks.emit(Kind.BLOCK_ALLOC, device=0, stack=at, **where)
    label = "model.py:7 (forward) [layers.0.fc -> addmm -> buf0]"
    attributed = "Compiled code held 5 KiB in 2 blocks: 60.0 % with graph node and line, 60.0 % with module too."
    missing = "Not attributed: 2 KiB in 1 block, allocated at a line that names no buffer."
    text = " ".join(CliRunner().invoke(snapshot, [str(path)], terminal_width=300).output.split())
    assert all(words in text for words in (label, attributed, missing))
    (device,) = json.loads(CliRunner().invoke(snapshot, [str(path), "--json"]).stdout)["devices"]
    assert device["generated"]["unattributed"] == [{"reason": "no-buffer", "size": 2048, "count": 1}]
    assert device["at_peak"][0]["compiled"]["module"] == "layers.0.fc"
    page = payload(analyze.report(reader.read(path)))
    (shown,) = json.loads(page[4 : 4 + int.from_bytes(page[:4], "little")])["devices"]
    assert (shown["generated"], shown["sites"]["label"][0]) == ([attributed, missing], label)


def test_a_private_pool_of_compiled_code_says_so(compiler: Compiler) -> None:
    path = compiler.path.with_name("x.ctrace")
    generated, own = Frame(str(compiler.path), "call", 4), Frame("/home/me/train.py", "step", 40)
    with Recorder(path, header={}):
        for number, (pool, frame) in enumerate([((0, 1), generated), ((0, 2), own), ((0, 0), generated)]):
            at = stacks.intern([frame])
            where = {"address": (number + 1) << 20, "size": 1024 * (3 - number), "aux1": pack_pool(pool)}
            hooks.emit(Kind.BLOCK_ALLOC, device=0, stack=at, aux0=1024, **where)
    (device,) = analyze.report(reader.read(path)).diagnoses
    expected = ["private pool (0, 1) of compiled code", "private pool (0, 2)", "default pool"]
    assert [usage.label for usage in device.by_pool] == expected


def test_a_part_of_a_recording_keeps_what_was_compiled_before(compiler: Compiler) -> None:
    main = Node("addmm")
    trace = recorded(compiler, graph_of(main, buf0=Buffer(main)))
    site, _ = site_of(window(trace, len(trace.records) - 1, len(trace.records)))
    assert site.compiled.module == "layers.0.fc"


def test_what_a_trigger_writes_has_the_code_that_was_compiled_long_before(compiler: Compiler) -> None:
    main, path = Node("addmm"), compiler.path.with_name("x.ctrace")
    ring = Ring({}, most_bytes=1)
    hooks.subscribe(ring)
    torch_generated.start()
    compiler.load(graph_of(main, buf0=Buffer(main)))
    at = stacks.intern([Frame(str(compiler.path), "call", 4)])
    for number in range(20_000):  # more than the ring keeps
        where = {"address": (number + 1) << 20, "size": 1024, "aux0": 1024}
        hooks.emit(Kind.BLOCK_ALLOC, device=0, stack=at, **where)
        hooks.emit(Kind.BLOCK_FREE_REQUESTED, device=0, **where)
        hooks.emit(Kind.BLOCK_FREE_COMPLETED, device=0, **where)
    hooks.unsubscribe(ring)
    ring.write(path)
    site, _ = site_of(reader.read(path))
    assert site.compiled.module == "layers.0.fc"
