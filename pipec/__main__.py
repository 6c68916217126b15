"""``python -m pipec``, which ``torchrun -m pipec`` needs."""

from pipec.cli import main

if __name__ == "__main__":
    main()
