"""What updates after every mini-batch add to the costs of operators, by which stages are cut."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipec.ir import VersionPolicy


@dataclass(frozen=True)
class UpdateCost:
    """Without a flush, every stage updates after each mini-batch, and holds its weights in several versions.

    ``state_bytes`` is what the optimizer keeps of each parameter. A device moves ``bytes_per_second``. A
    mini-batch has ``num_microbatches``. ``versions`` is None where it is not known yet which are held.
    """

    state_bytes: Mapping[str, int] = field(repr=False)
    bytes_per_second: float
    versions: VersionPolicy | None
    num_microbatches: int = 1

    def seconds(self, fqn: str, num_bytes: float) -> float:
        """The share of a microbatch in the update of a parameter.

        An update reads parameters, gradients and state, and writes parameters and state.
        """
        moved = 3 * num_bytes + 2 * self.state_bytes.get(fqn, 0)
        return moved / self.bytes_per_second / self.num_microbatches

    def resident_bytes(self, fqn: str, num_bytes: float, num_stages: int) -> float:
        """What a stage holds of a parameter's state and versions, besides ``bytes_in_flight``."""
        match self.versions:
            case VersionPolicy.STASHED:
                others = -1.0  # the latest is that of the microbatch that began last
            case VersionPolicy.VERTICAL:
                others = num_stages - 1
            case VersionPolicy.DOUBLE:
                others = 1.0
            case None:
                others = 0.0
        return self.state_bytes.get(fqn, 0) + others * num_bytes

    def bytes_in_flight(self, num_bytes: float) -> float:
        """What it holds of a parameter for each microbatch in flight: a version, where they are stashed."""
        return num_bytes if self.versions is VersionPolicy.STASHED else 0.0
