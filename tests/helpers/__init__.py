"""What tests of several files share: ranks to run on, what to look at inside a model, what to compare with.

``tests/conftest.py`` puts this folder on the path, also of the workers: ``from helpers.ranks import on_ranks``.
"""
