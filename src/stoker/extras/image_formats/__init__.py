"""Image sets of other layouts than folders: Pascal VOC, COCO, DexYCB."""
