"""Style and script of ``report.html``, put into the page itself."""
