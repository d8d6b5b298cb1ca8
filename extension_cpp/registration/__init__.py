"""Implements the registration of operators. These modules name no operator, and never import functional/."""
