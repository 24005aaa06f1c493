"""`python -m dspark`, as the `dspark` command."""

from .cli import main

main()
