"""A calculator of ASE that reads the energy of atoms and its gradients from an ONNX file."""

import onnxruntime
from ase.calculators.calculator import Calculator, all_changes
from ase.stress import full_3x3_to_voigt_6_stress


class OnnxCalculator(Calculator):
    """Energy in eV, forces in eV/Å and stress in eV/Å³, of a file of energy and gradients.

    The file has the inputs `positions` (1, atoms, 3) and `cell` (1, 3, 3), whose rows are vectors,
    and the outputs `energy` (1,), `positions_grad` and `cell_grad` of the shapes of the inputs.
    """

    implemented_properties = "energy", "free_energy", "forces", "stress"

    def __init__(self, path, **options):
        super().__init__(**options)
        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def calculate(self, atoms=None, properties=("energy",), system_changes=all_changes):
        """Set the results for the present positions and cell."""
        super().calculate(atoms, properties, system_changes)
        positions, cell = self.atoms.get_positions(), self.atoms.cell.array
        names = ["energy", "positions_grad", "cell_grad"]
        results = self.session.run(names, {"positions": positions[None], "cell": cell[None]})
        energy, slopes, pulls = (result[0] for result in results)
        self.results = {"energy": float(energy), "free_energy": float(energy), "forces": -slopes}
        if self.atoms.cell.rank == 3:
            virial = positions.T @ slopes + cell.T @ pulls
            stress = (virial + virial.T) / 2 / self.atoms.get_volume()
            self.results["stress"] = full_3x3_to_voigt_6_stress(stress)
