"""`python -m rcr_trainer.cli`, for launchers that start modules."""

import sys

from rcr_trainer.cli import main

sys.exit(main())
