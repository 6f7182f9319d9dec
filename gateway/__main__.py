"""`python -m gateway` is `prefix-gateway`."""

import sys

from gateway.cli import main

sys.exit(main())
