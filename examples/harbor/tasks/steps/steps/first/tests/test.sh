#!/bin/bash
. /tests/check.sh
expected=$(cat /tests/expected.txt)
if has_words "$expected"; then
    echo '{"reward": 1, "words": 1}' > /logs/verifier/reward.json
else
    echo '{"reward": 0, "words": 0}' > /logs/verifier/reward.json
fi
