"""Dashboards: panels and alerts as data, and the files and pictures generated from them."""
