"""Schedule templates, one file per variant, and the policies that say which of them to try."""
