"""``python -m dtorch_launcher`` is ``dtorch-launch``."""

from __future__ import annotations

from dtorch_launcher.cli import main

if __name__ == "__main__":
    main()
