"""How ranks come to run: started here, started by something else, or this process alone.

Imports no torch; ``agent`` does, and is imported only where ranks are started.
"""
