"""The calculator of ASE on the page of molecules and crystals, against the one of ASE itself."""

from __future__ import annotations

import re
import runpy

import numpy as np
import onnx
import pytest

import onnxgrad as og
from tests.support.models import parse_model
from tests.support.paths import DOCS, ROOT

pytest.importorskip("ase")
from ase import units
from ase.build import bulk
from ase.calculators.lj import LennardJones
from ase.md.verlet import VelocityVerlet

EPSILON, SIGMA, CUTOFF = 0.0104, 3.4, 5.2


def lennard_jones_file(path) -> None:
    """Write a file of the gradients of the energy of 32 atoms with the nearest images of pairs."""
    first, second = np.triu_indices(32, 1)
    ratio = (SIGMA / CUTOFF) ** 6
    energy = parse_model(
        """f (double[N,32,3] positions, double[N,3,3] cell) => (double[N] energy) {
            a = Gather<axis = 1>(positions, first)  b = Gather<axis = 1>(positions, second)
            apart = Sub(a, b)  diagonal = Mul(cell, eye)
            sides = ReduceSum<keepdims = 1>(diagonal, one)  shares = Div(apart, sides)
            images = Round(shares)  offsets = MatMul(images, cell)  d = Sub(apart, offsets)
            squares = Mul(d, d)  s = ReduceSum<keepdims = 0>(squares, two)
            q = Div(sigma, s)  u = Pow(q, three)  v = Mul(u, u)  w = Sub(v, u)
            x = Sub(w, shift)  y = Mul(x, depth)
            near = Less(s, limit)  z = Where(near, y, zero)
            energy = ReduceSum<keepdims = 0>(z, one) }""",
        first=first, second=second, eye=np.eye(3), one=[1], two=[2], three=np.array(3.0),
        sigma=np.array(SIGMA**2), depth=np.array(4 * EPSILON), zero=np.array(0.0),
        shift=np.array(ratio**2 - ratio), limit=np.array(CUTOFF**2),
    )  # fmt: skip
    options = og.DerivativeOptions.FillGrad | og.DerivativeOptions.KeepOutputs
    inputs = ["positions", "cell"]
    onnx.save(og.onnx_derivative(energy, inputs=inputs, weights=[], options=options), path)


@pytest.fixture
def calculator(tmp_path, monkeypatch):
    """The class of the page, in a folder with the file that it reads."""
    monkeypatch.chdir(tmp_path)
    lennard_jones_file("argon.onnx")
    return runpy.run_path(str(ROOT / "clients" / "ase" / "onnx_calculator.py"))["OnnxCalculator"]


def crystal(calculator):
    """Return a crystal whose atoms are displaced and move, with a calculator."""
    atoms = bulk("Ar", "fcc", a=5.3, cubic=True) * (2, 2, 2)
    atoms.rattle(0.1, seed=1)
    atoms.set_momenta(np.random.default_rng(0).normal(0, 0.3, (32, 3)))
    atoms.calc = calculator
    return atoms


def test_energy_forces_stress_and_paths_are_of_the_potential_of_lennard_jones(calculator):
    theirs = LennardJones(sigma=SIGMA, epsilon=EPSILON, rc=CUTOFF)
    pair = [crystal(calculator("argon.onnx")), crystal(theirs)]
    for steps in (0, 100):
        for atoms in pair:
            VelocityVerlet(atoms, timestep=2 * units.fs).run(steps)
        ours, expected = pair
        np.testing.assert_allclose(ours.positions, expected.positions, rtol=0, atol=1e-9)
        energies = ours.get_potential_energy(), expected.get_potential_energy()
        np.testing.assert_allclose(*energies, rtol=1e-9)
        np.testing.assert_allclose(ours.get_forces(), expected.get_forces(), rtol=0, atol=1e-9)
        np.testing.assert_allclose(ours.get_stress(), expected.get_stress(), rtol=0, atol=1e-9)


def test_the_listing_relaxes_and_moves_a_crystal(calculator, capsys):
    """The best side is the one of the potential of ASE, and the total energy stays."""
    page = (DOCS / "physics.md").read_text()
    (code,) = re.findall(r"```\{code-block\} python\n(.*?)```", page, re.DOTALL)
    *before, last = code.strip().splitlines()
    names = {"OnnxCalculator": calculator}
    exec("\n".join(before), names)
    atoms, sides = names["atoms"], np.linspace(10.4, 10.8, 401)
    theirs = atoms.copy()
    theirs.calc = LennardJones(sigma=SIGMA, epsilon=EPSILON, rc=CUTOFF)
    energies = []
    for side in sides:
        theirs.set_cell(side * np.eye(3), scale_atoms=True)
        energies.append(theirs.get_potential_energy())
    np.testing.assert_allclose(np.diag(atoms.cell), sides[np.argmin(energies)], atol=2e-3)
    total, kinetic = atoms.get_total_energy(), atoms.get_kinetic_energy()
    exec(last, names)
    assert atoms.get_kinetic_energy() < 0.9 * kinetic
    assert atoms.get_total_energy() == pytest.approx(total, abs=2e-3 * kinetic)
    assert "BFGS" in capsys.readouterr().out
