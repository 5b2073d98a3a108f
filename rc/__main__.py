"""``python -m rc`` is ``rc``."""

import sys

from rc.cli import main

sys.exit(main())
