"""Jobs: profiles of clusters, job scripts, and submitting, querying and stopping jobs. Imports no torch."""
