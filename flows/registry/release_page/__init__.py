"""The report with what was released: who decided, why, and which version is champion."""
