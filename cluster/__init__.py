"""SpecRay on Ray: lives, places and the HTTP surface. What a step computes is `specray`'s business."""
