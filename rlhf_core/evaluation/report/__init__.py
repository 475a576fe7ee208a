"""The one-file HTML report: inline CSS, SVG and PNG, no network, every text escaped."""
