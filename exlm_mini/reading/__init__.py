"""Reading a trained model: predictions, the graph of its states, and how far to trust them.

``trained`` opens a run, ``decoding`` reads masks. ``scene`` and ``explorer`` draw the graph as an
interactive page.
"""
