"""What a trained model says: predictions, the graph of its states, and how far to believe them.

``trained`` opens a run, ``decoding`` reads masks. ``scene`` and ``explorer`` draw the graph as a
page to play with.
"""
