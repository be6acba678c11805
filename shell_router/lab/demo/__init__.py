"""The demo: the whole product on one machine, without a GPU or a download."""

from shell_router.lab.demo.run import DemoSettings, run_demo

__all__ = ["DemoSettings", "run_demo"]
