"""``python -m fedstill`` is the command ``fedstill``."""

from fedstill.cli.main import main

if __name__ == "__main__":
    main()
