"""The wheel: what is in it, and that it works with nothing but JAX and Optax."""

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXTRAS = ["flax", "rich", "tyro", "matplotlib", "orbax", "equinox", "hypothesis"]
ALONE = f"""
import sys
sys.modules.update(dict.fromkeys({EXTRAS}))  # an import of them now fails
import jax.numpy as jnp, optax, optax_accum
tx = optax_accum.chain(optax_accum.accumulate(2), optax.sgd(1.0))
params = jnp.array([1.0, 2.0])
state = tx.init(params)
for _ in range(2):
    params, state = optax_accum.apply_gradients(tx, jnp.ones(2), state, params)
print(params, optax_accum.__file__)
"""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "build", "--wheel", "--no-isolation", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def run(*args, **kwargs):
    command = [sys.executable, *map(str, args)]
    done = subprocess.run(command, capture_output=True, text=True, **kwargs)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_it_holds_the_package_and_no_tests(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {
        "optax_accum",
        wheel.name.removesuffix("-py3-none-any.whl") + ".dist-info",
    }
    assert "optax_accum/py.typed" in names
    assert any(name.endswith("licenses/LICENSE") for name in names)
    sources = {f"optax_accum/{p.name}" for p in (ROOT / "optax_accum").glob("*.py")}
    assert sources <= set(names)
    assert not [name for name in names if "test" in name]


def test_it_works_when_installed_alone(wheel, tmp_path):
    run("-m", "pip", "install", "-q", "--no-deps", "--target", tmp_path, wheel)
    env = os.environ | {"PYTHONPATH": str(tmp_path)}
    printed = run("-W", "error", "-c", ALONE, cwd=tmp_path, env=env)
    assert printed.split() == ["[0.", "1.]", str(tmp_path / "optax_accum/__init__.py")]
