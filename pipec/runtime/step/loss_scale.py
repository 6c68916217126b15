"""The loss scale, which keeps float16 gradients from vanishing, by ``GradScaler``'s rule."""

from dataclasses import dataclass

from pipec.errors import NonFiniteError

GROWTH_FACTOR, BACKOFF_FACTOR, GROWTH_INTERVAL = 2.0, 0.5, 2000
MIN_SCALE = 2.0**-16
"""With a smaller scale a gradient is too large whatever it is multiplied by: something else is wrong."""


@dataclass
class LossScale:
    """The scale of ``torch.amp.GradScaler`` with its defaults, and how many updates were made with it.

    It is a power of two, so that gradients that are divided by it have the bits that they would have without
    it, but for those that would have vanished.
    """

    scale: float = 65536.0
    growth_tracker: int = 0

    def update(self, overflowed: bool) -> None:
        """Shrink where an update was left out because a gradient was not finite; grow after many that were.

        Raises:
            NonFiniteError: it has shrunk too often for that to be the scale's doing.
        """
        self.growth_tracker = 0 if overflowed else (self.growth_tracker + 1) % GROWTH_INTERVAL
        if overflowed:
            self.scale *= BACKOFF_FACTOR
        elif self.growth_tracker == 0:
            self.scale = min(self.scale * GROWTH_FACTOR, 2.0**127)
        if self.scale < MIN_SCALE:
            raise NonFiniteError(
                f"some gradient is not finite in step after step, down to a loss scale of {self.scale:.0e}: "
                "gradients, activations or the loss are not finite for another reason than the range of "
                "float16. See where with precision='bf16-mixed' or in float32, and on_nan='raise'"
            )
