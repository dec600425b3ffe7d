"""conf/ is found as pkg://lightning_sync.conf, from a wheel and from an editable install alike."""

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# site-packages is only appended, so that its .pth files (an editable install of this checkout) play no part.
LOOK = """
import site, sys
site.addsitedir(sys.argv[1])
sys.path.append(sys.argv[2])
from hydra import compose, initialize_config_module
import lightning_sync.conf
with initialize_config_module("lightning_sync.examples.conf", version_base="1.3"):
    cfg = compose("train", overrides=["strategy=strict", "compressor=int8"])
print(lightning_sync.conf.__path__[0], cfg.strategy._target_, cfg.compressor.block)
"""


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: building writes beside the sources."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("conf", "lightning_sync"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)
    return folder


def build(hook: str, checkout: Path, target: Path) -> Path:
    """Run a hook of the build backend as pip does, without asking an index for anything, and unpack the wheel."""
    code = f"import sys; from setuptools import build_meta; print(build_meta.{hook}(sys.argv[1]))"
    target.mkdir()
    done = subprocess.run([sys.executable, "-c", code, str(target)], cwd=checkout, text=True, capture_output=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = target.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(target / "site")
    return target / "site"


def look(site: Path, cwd: Path) -> list[str]:
    command = [sys.executable, "-I", "-S", "-c", LOOK, str(site), sysconfig.get_path("purelib")]
    done = subprocess.run(command, cwd=cwd, text=True, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()[-3:]


def test_wheel(checkout: Path, tmp_path: Path) -> None:
    site = build("build_wheel", checkout, tmp_path / "wheel")
    assert look(site, tmp_path) == [str(site / "lightning_sync/conf"), "lightning_sync.StrictStrategy", "256"]

    shipped = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    sources = [p for p in (ROOT / "lightning_sync").rglob("*") if p.suffix in (".py", ".yaml", ".typed")]
    assert {path.relative_to(ROOT).as_posix() for path in sources} <= shipped
    confs = [path for path in (ROOT / "conf").rglob("*") if path.suffix in (".py", ".yaml")]
    assert {f"lightning_sync/{path.relative_to(ROOT).as_posix()}" for path in confs} <= shipped
    tops = {name.split("/")[0] for name in shipped}
    assert tops == {"lightning_sync", "lightning_sync-0.1.0.dist-info"}


def test_editable_install(checkout: Path, tmp_path: Path) -> None:
    site = build("build_editable", checkout, tmp_path / "editable")
    assert look(site, tmp_path) == [str(checkout / "conf"), "lightning_sync.StrictStrategy", "256"]
