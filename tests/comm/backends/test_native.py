"""What the C++ part of a backend is built from."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleetune.comm.backends.native import NativePart, import_library
from fleetune.errors import KernelError
from fleetune.kernels.facts import sources_digest


def test_a_backend_is_built_from_what_all_share_and_its_own() -> None:
    content = NativePart(name="ccl", versions={"b": "2", "a": "1"}).sources()
    assert {"engine.cpp", "transport.h", "ccl/transport_ccl.cpp"} <= set(content)
    assert content["versions.h"] == b"// a 1\n// b 2\n"
    assert not any("/" in path and not path.startswith("ccl/") for path in content)
    other = NativePart(name="ccl", versions={"b": "3", "a": "1"}).sources()
    assert sources_digest(other) != sources_digest(content), "another version is another build"


def test_missing_headers_are_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(
        KernelError, match=f"Python's headers are missing from {tmp_path} .*apt-get install python3-dev"
    ):
        NativePart(name="ccl").recipe()


def test_a_file_that_is_no_module_is_told(tmp_path: Path) -> None:
    library = tmp_path / "libfleetune.so"
    library.write_bytes(b"nothing")
    with pytest.raises(
        KernelError, match=r"the module of backend ccl, .* cannot be loaded .*build-kernels --backends --force"
    ):
        import_library(NativePart(name="ccl"), library)
