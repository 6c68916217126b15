"""The costs that updates after every mini-batch add to operators, for cutting stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from pipec.ir import VersionPolicy


@dataclass(frozen=True)
class UpdateCost:
    """Costs of an asynchronous schedule: a stage updates after each mini-batch and holds weight versions.

    ``state_bytes`` has the bytes of optimizer state of each parameter. A device moves ``bytes_per_second``. A
    mini-batch has ``num_microbatches``. ``versions`` is None if the policy is not decided yet.
    """

    state_bytes: Mapping[str, int] = field(repr=False)
    bytes_per_second: float
    versions: VersionPolicy | None
    num_microbatches: int = 1

    def seconds(self, fqn: str, num_bytes: float) -> float:
        """The seconds of a parameter's update, divided by the microbatches of a mini-batch.

        An update reads the parameter, gradient and state, and writes the parameter and state.
        """
        moved = 3 * num_bytes + 2 * self.state_bytes.get(fqn, 0)
        return moved / self.bytes_per_second / self.num_microbatches

    def resident_bytes(self, fqn: str, num_bytes: float, num_stages: int) -> float:
        """The bytes of a parameter's state and versions on a stage, besides ``bytes_in_flight``."""
        match self.versions:
            case VersionPolicy.STASHED:
                others = -1.0  # the microbatch that began last uses the latest version
            case VersionPolicy.VERTICAL:
                others = num_stages - 1
            case VersionPolicy.DOUBLE:
                others = 1.0
            case None:
                others = 0.0
        return self.state_bytes.get(fqn, 0) + others * num_bytes

    def bytes_in_flight(self, num_bytes: float) -> float:
        """The bytes of a parameter for each microbatch in flight: one version, if versions are stashed."""
        return num_bytes if self.versions is VersionPolicy.STASHED else 0.0
