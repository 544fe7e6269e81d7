"""Files that appear complete or not at all (`atomic`), locks between processes (`locks`), digests (`digests`)."""
