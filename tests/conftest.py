"""What all tests share: no hub, no settings from the developer's own environment."""

import os

# Before any test imports transformers, which reads it once.
os.environ["HF_HUB_OFFLINE"] = "1"

for _name in [name for name in os.environ if name.startswith("RCR_") and name != "RCR_DATA"]:
    del os.environ[_name]
