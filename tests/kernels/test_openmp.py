from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from fleetune.errors import KernelError
from fleetune.kernels.openmp import check_openmp, mapped_file, openmp_of, torch_openmp

MAPS = """\
55d0c8a00000-55d0c8a01000 r--p 00000000 fe:00 1234                       /usr/bin/python3.11
55d0c9000000-55d0c9100000 rw-p 00000000 00:00 0                          [heap]
7f84de400000-7f84de437000 r-xp 00000000 fe:00 5351264                    /home/a b/torch/lib/libgomp.so.1
7f84de437000-7f84de636000 ---p 00037000 fe:00 5351264                    /home/a b/torch/lib/libgomp.so.1
7f84e0000000-7f84e0010000 r-xp 00000000 fe:00 77                         /opt/sklearn.libs/libgomp-e985bcbb.so.1.0.0
7f84e0010000-7f84e0020000 rw-p 00000000 00:00 0
"""


@pytest.mark.parametrize(
    ("address", "file"),
    [
        (0x7F84DE400000, "/home/a b/torch/lib/libgomp.so.1"),
        (0x7F84DE436FFF, "/home/a b/torch/lib/libgomp.so.1"),
        (0x7F84DE437000, "/home/a b/torch/lib/libgomp.so.1"),
        (0x7F84E0000040, "/opt/sklearn.libs/libgomp-e985bcbb.so.1.0.0"),
        (0x7F84E0010000, None),  # memory without a file
        (0x55D0C9000010, None),  # the heap
        (0x7F84DE636000, None),  # first address after a file
        (0, None),
    ],
)
def test_the_file_at_an_address(address: int, file: str | None) -> None:
    assert mapped_file(MAPS, address) == (None if file is None else Path(file))


def test_no_maps() -> None:
    assert mapped_file("", 0x7F84DE400000) is None


def test_torch_uses_the_runtime_of_its_wheel() -> None:
    """The very copy, although scikit-learn may have loaded another before."""
    import sklearn.metrics  # noqa: F401

    found = torch_openmp()
    assert found is not None
    assert found.parent == Path(torch.__file__).parent / "lib"
    assert found.name.startswith("libgomp")


def test_a_library_without_openmp() -> None:
    assert openmp_of("libm.so.6") is None
    assert check_openmp(Path("libm.so.6")) is None


def test_a_second_runtime_is_refused(tmp_path: Path) -> None:
    """A stand-in that has nothing but the name of a function."""
    other, kernels = tmp_path / "libother_omp.so", tmp_path / "libkernels.so"
    flags = ["g++", "-shared", "-fPIC", "-x", "c++"]
    subprocess.run(
        [*flags, "-", "-o", other], input='extern "C" int omp_get_max_threads() { return 1; }', text=True, check=True
    )
    subprocess.run(
        [*flags, "-", "-o", kernels, "-x", "none", other, f"-Wl,-rpath,{tmp_path}"], text=True, check=True,
        input='extern "C" int omp_get_max_threads(); extern "C" int ours() { return omp_get_max_threads(); }',
    )  # fmt: skip
    assert openmp_of(str(kernels)) == other
    with pytest.raises(KernelError) as caught:
        check_openmp(kernels)
    assert str(caught.value).startswith(f"the compiled kernels use the OpenMP runtime {other}, torch uses ")
    assert "fleetune build-kernels --force" in caught.value.remedy
    assert ctypes.CDLL(str(kernels)).ours() in (1, torch.get_num_threads())
