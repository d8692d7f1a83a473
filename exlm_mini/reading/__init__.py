"""Reading a trained model: predictions, the graph of its states, and how far to trust them.

``trained`` loads the model of a run, ``decoding`` fills masks with it. ``scene`` and ``explorer``
show the graph as an interactive page.
"""
