"""What pyproject.toml cannot say: the C libraries, and the allocator's policy compiled where mypyc is at hand.

The policy's source stays Python and runs as it is; compiled, it is about three times as fast. An editable install
leaves it uncompiled, so that what is edited is what runs, and so does CUDATOOL_PURE=1.
"""

import os
import sys
import sysconfig
import warnings

from setuptools import Distribution, Extension, setup

POLICY = [
    f"cudatool/memory/{name}.py"
    for name in ("allocator", "blocks", "journal", "oom", "policy", "pools", "segments", "statistics")
]

libraries = [
    # Python modules, unlike the others.
    Extension("cudatool.runtime._native", ["cudatool/runtime/_native.c"]),
    Extension("cudatool.collect._unpickle", ["cudatool/collect/_unpickle.c"]),
    Extension(
        "cudatool.collect._cupti",
        ["cudatool/collect/_cupti.c"],
        depends=[
            "cudatool/collect/_log_exports.h",
            "cudatool/collect/_log_rows.h",
            *(
                f"cudatool/collect/_cupti_{part}.h"
                for part in ("activity", "api", "devices", "launches", "log", "stacks")
            ),
        ],
        extra_link_args=["-ldl"],
    ),
    Extension("cudatool.collect._log_rows", ["cudatool/collect/_log_rows.c"], depends=["cudatool/collect/_log_rows.h"]),
    Extension(
        "cudatool.collect._nvtx",
        ["cudatool/collect/_nvtx.c"],
        depends=["cudatool/collect/_log_exports.h", "cudatool/collect/_log_rows.h"],
    ),
    Extension("cudatool.trace._append", ["cudatool/trace/_append.c"]),
    Extension("cudatool.trace._emit", ["cudatool/trace/_emit.c"]),
    Extension("cudatool.trace._rows", ["cudatool/trace/_rows.c"]),
    Extension("cudatool.trace._sweep", ["cudatool/trace/_sweep.c"]),
    Extension("cudatool.trace._walk", ["cudatool/trace/_walk.c"]),
    Extension("cudatool.sim._calls", ["cudatool/sim/_calls.c"]),
    Extension("cudatool.sim._footprint", ["cudatool/sim/_footprint.c"]),
    Extension("cudatool.sim._handler", ["cudatool/sim/_handler.c"]),
    Extension(
        "cudatool.sim._queue",
        ["cudatool/sim/_queue.c", "cudatool/sim/_launches.c"],
        depends=["cudatool/sim/_queue.h", "cudatool/sim/_workers.h"],
    ),
    # Not a Python module: a libcuda.so.1 whose entry points are resolved in Python (docs/design/software-device.md).
    Extension(
        "cudatool.sim._libcuda",
        [
            f"cudatool/sim/{name}.c"
            for name in ("_libcuda", "_exports", "_device", "_texture", "_races", "_race_order", "_workers")
        ],
        depends=["cudatool/sim/_races.h", "cudatool/sim/_workers.h"],
        libraries=["m"],
        extra_link_args=["-Wl,-soname,libcuda.so.1", "-ldl"],
    ),
    Extension(
        "cudatool.sim._libnvrtc",
        ["cudatool/sim/_libnvrtc.c"],
        extra_link_args=["-Wl,-soname,libnvrtc.so.13", "-ldl"],
    ),
    Extension(
        "cudatool.sim._libnvjitlink",
        ["cudatool/sim/_libnvjitlink.c"],
        depends=["cudatool/sim/_libnvjitlink.map"],
        extra_link_args=[
            "-Wl,-soname,libnvJitLink.so.13",
            "-Wl,--version-script=cudatool/sim/_libnvjitlink.map",
            "-ldl",
        ],
    ),
]


def compiled_policy() -> list[Extension]:
    """Return the policy's modules as extensions, or none with a warning that says why."""
    builds = {"build", "build_ext", "bdist_wheel", "install"} & set(sys.argv)
    if not builds or os.environ.get("CUDATOOL_PURE") == "1":
        return []
    # Errors in modules that the policy does not need are not its business.
    options = ["--strict", "--follow-imports=silent", "--python-version=3.11"]
    try:
        from mypyc.build import mypycify

        extensions: list[Extension] = mypycify(
            [*options, *POLICY], group_name="cudatool.memory._policy", opt_level="3", debug_level="0"
        )
    except (ImportError, SystemExit) as error:  # no mypyc, or one whose rules have grown stricter
        warnings.warn(f"the allocator's policy stays uncompiled, and slower: {error}", stacklevel=2)
        return []
    return extensions


class WithDataFiles(Distribution):
    """An editable install asks for ``has_data``, which no distribution has, and would leave the data files out."""

    def has_data(self) -> bool:
        return self.has_data_files()


# Python itself reads cudatool_child.pth as it starts (cudatool/processes): it belongs beside the packages.
site_packages = os.path.relpath(sysconfig.get_path("purelib"), sysconfig.get_path("data"))

setup(
    distclass=WithDataFiles,
    ext_modules=[*libraries, *compiled_policy()],
    data_files=[(site_packages, ["cudatool/cudatool_child.pth"])],
)
