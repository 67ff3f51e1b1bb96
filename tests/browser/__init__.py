"""The dashboard in a real browser: ``make browser``. Needs Chromium (Debian's ``chromium``) and playwright, in an environment of its own."""
