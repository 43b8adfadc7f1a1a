"""Hugging Face folders in and out of our parameters; what a family is comes from its plugin.

``config_keys`` (torch-free) maps config.json, ``importing`` fills parameters, ``exporting`` writes
a folder that transformers loads. Both directions read the same maps, so they cannot disagree.
"""
