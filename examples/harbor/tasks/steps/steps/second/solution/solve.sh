echo plum >> words.txt
