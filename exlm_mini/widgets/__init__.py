"""An explorer of the state graph: HTML for the book, for Jupyter and as a file of its own.

``read_scene`` takes from a reading what there is to see, ``explorer`` draws it. In the page a
reader looks at states, and fixes a word or a state for a mask; the distribution of all other
masks then follows, exactly: JavaScript runs the forward-backward recursion over the graph, the
same that ``conditionals`` runs here. Nothing is loaded from elsewhere and nothing is written
but inside the element with the class ``exlm-widget``, so several fit on one page.

The HTML is a pure function of the scene, and a scene holds four significant digits. Those of a
freshly trained model still differ between processors: where the output of a page is compared,
draw a scene that was recorded (``Scene.to_json``).

Shapes: S masks, M targets (S + 2), L states, W words of a scene, N input tokens.
"""

from exlm_mini.widgets.drawing import Explorer, explorer
from exlm_mini.widgets.scene import (
    Conditionals,
    Scene,
    conditionals,
    read_scene,
    scene_from_json,
)

__all__ = [
    "Conditionals",
    "Explorer",
    "Scene",
    "conditionals",
    "explorer",
    "read_scene",
    "scene_from_json",
]
