"""`python -m dspark.cli`."""

from . import main

main()
