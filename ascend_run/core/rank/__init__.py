"""What a rank reads of its launcher, the group that it joins, and the failure that it reports."""
