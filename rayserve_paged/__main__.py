"""`python -m rayserve_paged`: the command, where its script is not on the path."""

from rayserve_paged.cli import main

if __name__ == "__main__":
    main()
