"""``python -m pctree``: the same as the command ``pctree``."""

from pctree.cli import main

if __name__ == "__main__":
    main()
