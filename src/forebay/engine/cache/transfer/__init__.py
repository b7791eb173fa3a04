"""Copies between the tiers, on threads beside compute."""
