"""Named files from elsewhere: checked, resumed, several at once, none lost in silence."""
