#!/bin/bash
# The exit status says nothing: only the reward file counts.
if [ "$(tr '\n' ' ' < /app/sorted.txt)" = "$EXPECTED " ]; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
exit 1
