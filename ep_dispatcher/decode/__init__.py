"""Decode layout: a place for every row that an expert may get, so that no shape depends on counts. No gradients."""
