"""Plugins that are wrong in one way each, and one that is right: what the kit's checks are held to.

They are copied out of this tree and installed for the length of a test.
"""
