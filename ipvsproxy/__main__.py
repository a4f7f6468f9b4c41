"""``python -m ipvsproxy``."""

import sys

from ipvsproxy import cli

sys.exit(cli.main())
