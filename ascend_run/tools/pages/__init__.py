"""Building blocks of HTML pages that several commands write."""
