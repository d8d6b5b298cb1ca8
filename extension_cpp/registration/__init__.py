"""How operators are registered: the mechanism, which knows no operator's name. It never imports functional/."""
