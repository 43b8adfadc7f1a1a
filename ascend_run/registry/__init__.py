"""Which plugins exist, which may run together, and why.

``discovery`` finds them, ``resolution`` orders a set or refuses it, ``explanation`` says who owns
which hook, ``lock`` says what exactly they are. Nothing is imported here: a listing needs the first
alone, and has a tenth of a second.
"""
