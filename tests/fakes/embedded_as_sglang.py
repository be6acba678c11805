"""An engine of the embedded pair, started with SGLang's command line."""

import os
import sys

UNKNOWN = "--enable-metrics"
UNKNOWN_WITH_VALUE = "--disaggregation-transfer-backend"


def main() -> None:
    flags = [flag for flag in sys.argv[1:] if flag != UNKNOWN]
    at = flags.index(UNKNOWN_WITH_VALUE)
    del flags[at : at + 2]
    os.execv(sys.executable, [sys.executable, "-m", "shell_router.standins.embedded", *flags])


if __name__ == "__main__":
    main()
